"""For tests of pools, ours and others': an oracle that shares no code with the core, and small rigs."""

"""Replay of prefix-hash traces with real bytes: reading, generating, content, the run and its report."""

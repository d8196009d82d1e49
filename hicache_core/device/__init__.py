"""Device runtimes: the simulator, which is the default, and the bindings of real ones."""

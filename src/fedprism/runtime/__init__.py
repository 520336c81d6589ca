"""How work is run: devices, executors, progress, memory, and fast replays of differentiated computations."""

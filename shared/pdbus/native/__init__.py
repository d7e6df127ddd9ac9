"""The CPU engine in C++: compiled where it runs, loaded with ctypes, never required (model/ falls back to torch)."""

"""One-sided messages between processes: windows, slots, frames, signals.

It knows nothing of what the bytes mean. README.md holds the promises and an example; native code uses the
headers under native/.
"""

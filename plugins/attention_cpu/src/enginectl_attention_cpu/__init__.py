"""Paged attention and an op set in C++ for enginectl on a CPU."""

"""Paged attention and model ops in Triton for enginectl. Importing this imports neither torch nor triton."""

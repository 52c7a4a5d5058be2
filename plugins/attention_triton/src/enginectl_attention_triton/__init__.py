"""Paged attention kernels in Triton for enginectl. This version registers nothing."""

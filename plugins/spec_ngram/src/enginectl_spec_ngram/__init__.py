"""Prompt-lookup speculation for enginectl. This version registers nothing."""

"""Prompt-lookup speculation for enginectl."""

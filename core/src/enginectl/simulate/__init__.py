"""Capacity planning without the hardware: the real loop, scheduler, allocator and prefix index under a virtual clock.

Only the forward pass is replaced, by what it would cost: `a + b * rows + c * tokens` seconds a step.
"""

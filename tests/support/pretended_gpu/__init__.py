"""A GPU that is pretended on a CPU, and NCCL between its ranks, which are threads.

`device` is the GPU, `nccl` what travels, `world` trains a case of the tests on them. What they show is what
a CPU hides: where the host waits for the device, what mixes both memories, what is written while it is sent
or read before it has come, what a captured graph repeats, and what hangs where kernels wait for transfers.
They do not show what needs the real thing: its kernels, its allocator, its speed.
"""

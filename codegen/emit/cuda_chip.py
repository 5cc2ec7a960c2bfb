"""Numbers of NVIDIA's chips that texts and schedules of kernels rest on."""

MULTIPROCESSORS = 132  # of an H200
SHARED_BYTES = 227 << 10  # that a block may have, on every chip of these targets
CORE_BYTES = 228 << 10  # that all blocks of a multiprocessor share, each with 1,024 of its own

"""Adapters to megatron-core: the only package that touches its private names.

Importing any module of this package first installs the CPU stand-ins (a no-op if CUDA is present), because upstream
modules bind some CUDA functions when they are imported.
"""

from megatron_ext.mcore.platform import install_cpu_stand_ins

install_cpu_stand_ins()

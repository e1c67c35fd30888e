"""Adapters to megatron-core: the only package that touches its private names.

Importing any module of this package first checks the version, and installs the CPU stand-ins (a no-op if CUDA is
present), because upstream modules bind some CUDA functions when they are imported.
"""

from megatron_ext.mcore.platform import install_cpu_stand_ins
from megatron_ext.mcore.upstream_version import check_supported, found_version

check_supported(found_version())
install_cpu_stand_ins()

"""Adapters to megatron-core: the only package that touches its private names.

Importing any module of this package first checks the version, hides upstream's warnings of optional packages that are
not installed, and installs the CPU stand-ins (a no-op if CUDA is present), because upstream modules bind some CUDA
functions when they are imported.
"""

import warnings

from megatron_ext.mcore.platform import install_cpu_stand_ins
from megatron_ext.mcore.upstream_version import check_supported, found_version

check_supported(found_version())
warnings.filterwarnings("ignore", r".*Apex (is|are) not installed", UserWarning, module=r"megatron\.core")
install_cpu_stand_ins()

"""How Megatron sees us: adapters to megatron-core 0.16.1, the only place that touches its private names.

Importing any module of this package first puts the CPU stand-ins in place (nothing happens where CUDA is present),
because upstream modules bind some CUDA functions when they are imported.
"""

from megatron_ext.mcore.platform import install_cpu_stand_ins

install_cpu_stand_ins()

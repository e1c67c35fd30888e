"""Imports of the fork server of `tests/forked.py` before it forks, so that processes start at once.

Nothing here computes: a process that has run a parallel region of OpenMP, or started any other thread, must not fork.
Where processes are started by exec instead, this is not imported.
"""

import importlib

from megatron_ext.mcore import platform

platform.install_cpu_stand_ins()  # before anything imports megatron-core's engines
for name in (
    "hypothesis",
    "pytest",
    "torch.distributed",
    "megatron.core.dist_checkpointing",
    "megatron.core.inference.engines.dynamic_engine",
    "megatron_ext.mcore.assemble",
    "megatron_ext.models.load",
    "transformers",
    "megatron_ext.offline.run",
    "megatron_ext.server.run",
    "megatron_ext.commands.run",
    "megatron_ext.commands.serve",
    "tests.unit_tests.support.driver",
    "tests.unit_tests.support.hybrid_caching",
):
    importlib.import_module(name)

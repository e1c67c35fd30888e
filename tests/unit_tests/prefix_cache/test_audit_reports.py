"""EX-15: reports of wrong entries of the prefix cache."""

from __future__ import annotations

import json
import os
import re
import stat

import pytest

from megatron_ext.engine.cache_audit import AuditFinding
from megatron_ext.errors import ConfigError
from megatron_ext.prefix_cache import audit_reports
from megatron_ext.prefix_cache.audit_reports import AuditReports

FINDING = AuditFinding("kv", "d1", 64, 0.5, 1e-4, 3, 1.8e9, is_from_disk=True)


def test_a_report_is_a_file_of_this_user_alone(tmp_path):
    directory = tmp_path / "new" / "reports"
    AuditReports(directory).write({"key": "00ff"} | FINDING.shown())
    (report,) = directory.iterdir()
    assert re.fullmatch(rf"audit-\d{{8}}T\d{{6}}Z-{os.getpid()}-1\.json", report.name)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (report, directory)] == [0o600, 0o700]
    assert json.loads(report.read_text()) == {
        "key": "00ff",
        "kind": "kv",
        "digest": "d1",
        "position": 64,
        "difference": 0.5,
        "bound": 1e-4,
        "dropped_blocks": 3,
        "wall_time": 1.8e9,
        "is_from_disk": True,
    }


def test_the_oldest_reports_go_and_other_files_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(audit_reports, "MAX_REPORTS", 3)
    (tmp_path / "notes.json").touch()
    reports = AuditReports(tmp_path)
    for number in range(5):
        reports.write({"number": number})
        for path in tmp_path.glob("audit-*"):
            written = json.loads(path.read_text())["number"]
            os.utime(path, (written, written))
    assert {json.loads(path.read_text())["number"] for path in tmp_path.glob("audit-*")} == {2, 3, 4}
    assert (tmp_path / "notes.json").exists()


def test_a_directory_of_others_is_refused(tmp_path, caplog):
    """A directory that cannot be used is refused at the start; later, a report that fails costs nothing else."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match=r"--prefix-cache-audit-dir: .*name another directory"):
        AuditReports(shared).require()
    AuditReports(shared).write({})
    assert list(shared.iterdir()) == []
    assert "report was not written" in caplog.text

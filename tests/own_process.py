"""Test files that run in a process of their own.

`test_device.py` adds a device to torch. That has to come before the first backward of a process,
and from then on all its tests have an accelerator. So if other files run as well, pytest starts a
process for this one, and each of its tests reports what happened there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

FILES = ("test_device.py", "test_host_tier.py")
REPORTS = "RETROGRAD_TEST_REPORTS"  # the file that a process of its own writes its reports to
LIMIT = 600.0  # seconds: only a hang takes that long


def configure(config: pytest.Config) -> None:
    """For `pytest_configure` in conftest.py."""
    if REPORTS in os.environ:
        config.pluginmanager.register(_Recorder(config, Path(os.environ[REPORTS])))
    else:
        config.pluginmanager.register(_OwnProcess(config))


class _Recorder:
    """In that process: writes every report to a file."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self.config = config
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        with self.path.open("a") as file:
            file.write(json.dumps(data) + "\n")


class _OwnProcess:
    """In the process that was asked for: repeats the reports of the other one."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.reports: dict[str, dict[str, list[Any]]] = {}  # by file and test
        self.output = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        name = item.path.name
        if name not in FILES or all(other.path.name == name for other in item.session.items):
            return None
        if name not in self.reports:
            tests = [test.nodeid for test in item.session.items if test.path == item.path]
            self.reports[name] = self._run(tests)
        reports = self.reports[name].get(item.nodeid) or [self._missing(item)]
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run(self, tests: list[str]) -> dict[str, list[Any]]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "reports"
            path.touch()
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests],
                cwd=self.config.rootpath,
                env={**os.environ, REPORTS: str(path)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT,
                check=False,
            )
            self.output = done.stdout
            reports: dict[str, list[Any]] = {}
            for line in path.read_text().splitlines():
                data = json.loads(line)
                make = self.config.hook.pytest_report_from_serializable
                report = make(config=self.config, data=data)
                reports.setdefault(report.nodeid, []).append(report)
        return reports

    def _missing(self, item: pytest.Item) -> pytest.TestReport:
        text = f"the process of {item.path.name} did not run this test:\n{self.output}"
        return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")

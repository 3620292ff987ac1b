"""Progress of a test run: a line with counts every twenty seconds, and one for each failed test at once."""

import time

import pytest

_SECONDS = 20


def pytest_configure(config):
    # Output of xdist workers is not shown.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config), "progress")


class Progress:
    """Plugin that prints failures, and the counts of finished tests at most every twenty seconds."""

    def __init__(self, config):
        self.config, self.started = config, time.monotonic()
        self.printed = self.started
        self.ended, self.failed = 0, set()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        self.ended += report.when == "teardown"
        is_new = report.failed and report.nodeid not in self.failed
        if report.failed:
            self.failed.add(report.nodeid)
        now = time.monotonic()
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None or (not is_new and now - self.printed < _SECONDS):
            return
        if reporter._tw.width_of_current_line:
            reporter._tw.line()
        if is_new:
            reporter.write_line(f"FAILED {report.nodeid}", flush=True)
            return
        self.printed = now
        reporter.write_line(
            f"{self.ended:,} of {reporter._session.testscollected:,} tests, {len(self.failed)} failed, "
            f"{(now - self.started) / 60:.1f} minutes",
            flush=True,
        )

"""The outcome of a pytest run as a result."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks import results, suite_report

REPORT = """
<testsuites><testsuite>
  <testcase classname="test.test_a" name="one"/>
  <testcase classname="test.test_a.TestB" name="two"><failure>x</failure></testcase>
  <testcase classname="test.test_a" name="three"><error>x</error></testcase>
  <testcase classname="test.test_c" name="four"><skipped>x</skipped></testcase>
</testsuite></testsuites>
"""


def test_counts_by_file() -> None:
    rows = list(suite_report.rows(ElementTree.fromstring(REPORT)))
    counts = {(row["case"], row["metric"]): row["ours"] for row in rows}
    assert counts == {
        ("test/test_a.py", "passed"): 1,
        ("test/test_a.py", "failed"): 2,
        ("test/test_a.py", "skipped"): 0,
        ("test/test_c.py", "passed"): 0,
        ("test/test_c.py", "failed"): 0,
        ("test/test_c.py", "skipped"): 1,
    }


def test_rows_are_valid_results() -> None:
    header = results.collect_header("gpu-tests", "python -m benchmarks.suite_report")
    document = {**header, "rows": list(suite_report.rows(ElementTree.fromstring(REPORT)))}
    results.validate(document)

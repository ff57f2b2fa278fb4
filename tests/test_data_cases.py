"""Every folder of tests/data/cases behaves as its expect.json says."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path

import numpy as np
import pytest

from core.data.images import load_rgb
from core.data.scan import scan
from core.data.sources import open_source

CASES = Path(__file__).parent / "data" / "cases"


@pytest.mark.parametrize("name", sorted(path.name for path in CASES.iterdir()))
def test_case_behaves_as_it_says(name: str, tmp_path: Path):
    case = json.loads((CASES / name / "expect.json").read_text(encoding="utf-8"))
    target = CASES / name / case["input"]
    source = open_source(str(target), tmp_path)
    report = scan(source, home=tmp_path, seed=0, val_percent=20).report(with_files=True)
    assert report["outcome"] in (case["outcome"], case.get("alternative_outcome"))
    ordered = sorted if case.get("classes_any_order") else list
    assert ordered(report["classes"]) == ordered(case["classes"])
    assert report["class_counts"] == case["class_counts"]
    assert report["usable_images"] == case["usable_images"]
    if "splits" in case:
        assert report["splits"] == case["splits"]
    assert report["skipped"] == sorted(case.get("skipped", []), key=lambda item: item["file"])
    for text in case.get("warn", []):
        assert any(text in warning for warning in report["warnings"]), report["warnings"]
    assert len(report["warnings"]) == len(case.get("warn", []))
    for pattern in case.get("ignored", []):
        assert any(fnmatch.fnmatch(file, pattern) for file in report["ignored"])
    labels = {item["file"]: item["label"] for item in report["files"]}
    assert len(labels) == len(report["files"])
    for check in case.get("label_checks", []):
        assert labels[check["file"]] == check["label"]
    for check in case.get("pixel_checks", []):
        check_pixels(source.root, check)


def check_pixels(root: Path, check: dict):
    image = load_rgb(root / check["file"]).astype(float)
    if "size" in check:
        assert [image.shape[1], image.shape[0]] == check["size"]
    if "same_as" in check:
        assert np.abs(image - load_rgb(root / check["same_as"])).mean() <= check["tol"]
    if "mean_rgb" in check:
        assert np.abs(image.mean((0, 1)) - check["mean_rgb"]).max() <= check["tol"]
    if "min_std" in check:
        assert image.std() >= check["min_std"]

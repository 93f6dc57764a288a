"""Static HTML report on runs, their profiles and a ladder of experiments.

A ladder measures one optimization after another. Figures are SVG. The templates in this folder
escape all text.
"""

from surefoot.control.report.figure import Whole
from surefoot.control.report.files import read_ladder, read_measured, read_profile, read_shape
from surefoot.control.report.page import render
from surefoot.control.report.rows import ReportPage, RunRows, TableRows

__all__ = [
    "ReportPage",
    "RunRows",
    "TableRows",
    "Whole",
    "read_ladder",
    "read_measured",
    "read_profile",
    "read_shape",
    "render",
]

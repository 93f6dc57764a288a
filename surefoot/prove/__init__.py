"""Tests in fresh processes: does a run repeat, and does it resume as if never interrupted?"""

"""NeMo Automodel's names for a cache, and its YAML, on `format`, `writers` and `readers`; no room below imports it.

In come the calls of a script that was written for Automodel's DSpark cache (`automodel` writes, `dataset` reads), or a
recipe of its precompute (`automodel_yaml`); out come stores of ours, torch datasets, and settings of a precompute.
Read `automodel` first.
"""

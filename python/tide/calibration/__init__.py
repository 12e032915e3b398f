"""The CTAs of a sum on a GPU, chosen from rates and added compute time that are measured there.

`tide calibrate` measures, and so does the adapter on a machine that has not been calibrated; what
was measured is a machine file in TIDE's cache folder (store.py). src/plan/sizing_rules.cc chooses.
"""

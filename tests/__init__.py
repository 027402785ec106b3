"""The tests mirror the packages; `tests.helpers` holds what several of them share."""

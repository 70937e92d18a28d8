"""The track record: defects of promises that were mended, each with the test that finds it."""

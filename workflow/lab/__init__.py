"""The lab: it measures, keeps records, judges predictions and renders the report."""

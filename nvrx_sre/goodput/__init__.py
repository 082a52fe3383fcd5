"""Pure folds over the event stream: time ledger, incidents, verdicts."""

"""Pure decisions: classify a fault, count attempts against caps, climb the ladder."""

"""Jobs like those of published traces, and their replay through the decisions that the scheduler makes."""

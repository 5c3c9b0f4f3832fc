"""How the launchers of a job find its store, meet there, and notice who is gone."""

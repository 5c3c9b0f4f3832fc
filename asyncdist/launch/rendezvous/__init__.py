"""How the launchers of a job find its store, meet there, and notice which of them are gone."""

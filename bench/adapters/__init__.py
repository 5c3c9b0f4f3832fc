"""What is measured, one library a file, behind one small interface (`bench.adapters.base`)."""

"""What training changes: parameters in groups, their schedule, their averages, and the state of all."""

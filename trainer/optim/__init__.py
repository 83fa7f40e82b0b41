"""What training changes: parameters in groups, their schedule, their averages, the state of all."""

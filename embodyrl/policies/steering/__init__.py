"""A small actor beside a frozen model: it chooses where the model starts, or corrects what it proposes. No torch."""

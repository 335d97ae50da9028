"""Off-policy learning: SAC, replay buffers, hindsight goals and filtered behavior cloning."""

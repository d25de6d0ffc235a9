"""Training of the classifiers of three papers, which the policies `disco`, `specdecpp` and `c2t` use."""

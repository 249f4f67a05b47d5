"""The perfect model for Gaussian data: everything about diffusing N(mean, cov) is known in closed form."""

import torch


class GaussianOracle:
    """Data x0 ~ N(mean, cov) of C numbers, held as images (N, C, 1, 1), under x_t = alpha x0 + sigma eps."""

    def __init__(self, mean, cov):
        self.mean = torch.tensor(mean, dtype=torch.float64)
        self.cov = torch.tensor(cov, dtype=torch.float64)

    def x0(self, x_t, alpha, sigma):
        """E[x0 | x_t] = mean + alpha cov (alpha^2 cov + sigma^2 I)^-1 (x_t - alpha mean), float64."""
        marginal_cov = alpha**2 * self.cov + sigma**2 * torch.eye(len(self.cov))
        gain = alpha * self.cov @ torch.linalg.inv(marginal_cov)
        x0 = self.mean + (x_t.flatten(1).double() - alpha * self.mean) @ gain.T
        return x0[:, :, None, None]

    def ode(self, x, start, end):
        """The probability-flow ODE's exact solution from (alpha, sigma) = start to end: quantiles are carried along."""
        values, vectors = torch.linalg.eigh(self.cov)
        deviation = lambda alpha, sigma: torch.sqrt(alpha**2 * values + sigma**2)
        x = (x.flatten(1).double() - start[0] * self.mean) @ vectors
        x = x * deviation(*end) / deviation(*start)
        x = end[0] * self.mean + x @ vectors.T
        return x[:, :, None, None]

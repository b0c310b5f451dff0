"""The section `selection`: the choice at the end of a search, by validation alone or with the
selection part.

It is a simulation. The nodes are MODELS small models of random settings, fitted to random parts of
a task's training data. Their predictions for the hidden rows are real, so nodes that agree share
their luck. The hidden rows are the population: the true quality of a node is its score on all of
them. A trial draws some nodes, and anew a validation, a selection and a test part of the sizes that
the task has, with replacement. How a search finds its nodes is not simulated.

The regret of a rule is the best true quality minus that of its node. Intervals are over trials; all
trials of a task share its models.
"""

import random

import numpy as np
import pandas

from bench.measure import PROJECT
from flatlab.tree.selection import FINALISTS
from flatlab.view.stats import mean_interval

MODELS = 400
TRIALS = 4000
NODES = (12, 50, 200)
PARTS = ("validation", "selection", "test")


def read_task(name):
    """(train inputs, train target, hidden inputs, hidden target, part sizes) of a task."""
    folder = PROJECT / "configs" / "tasks" / name
    train = pandas.read_csv(folder / "train.csv")
    test = pandas.read_csv(folder / "test.csv")
    answers = pandas.read_csv(folder / "answers.csv")
    target = answers.columns[-1]
    columns = test.columns.drop("id")
    inputs = pandas.get_dummies(pandas.concat([train, test])[columns]).to_numpy(float)
    first, second = np.split(inputs, [len(train)])
    truth = answers.set_index("id")[target][test["id"]]
    sizes = answers["part"].value_counts()
    return first, train[target].to_numpy(float), second, truth.to_numpy(float), sizes


def random_model(rng, is_regression):
    """A small model with random settings."""
    from sklearn import ensemble, linear_model, neighbors, pipeline, preprocessing, svm, tree

    scaled = preprocessing.StandardScaler()
    strength = 10 ** rng.uniform(-3, 3)
    depth = rng.randint(1, 10)
    near = {"n_neighbors": rng.randint(1, 40)}
    forest = {"n_estimators": 20, "max_depth": depth, "random_state": rng.randint(0, 999)}
    grown = {"max_depth": depth, "random_state": 0}
    if is_regression:
        kinds = [
            linear_model.Ridge(strength),
            neighbors.KNeighborsRegressor(**near),
            tree.DecisionTreeRegressor(**grown),
            ensemble.RandomForestRegressor(**forest),
            svm.SVR(C=strength),
        ]
    else:
        kinds = [
            linear_model.RidgeClassifier(strength),
            neighbors.KNeighborsClassifier(**near),
            tree.DecisionTreeClassifier(**grown),
            ensemble.RandomForestClassifier(**forest),
            svm.SVC(C=strength),
        ]
    return pipeline.make_pipeline(scaled, rng.choice(kinds))


def predictions(name):
    """(predictions of MODELS models for the hidden rows, answers, is a regression, part sizes)."""
    seen, target, hidden, truth, sizes = read_task(name)
    is_regression = name == "diabetes"
    rng = random.Random(0)
    predicted = []
    for _ in range(MODELS):
        rows = rng.sample(range(len(seen)), int(rng.uniform(0.3, 1) * len(seen)))
        width = max(1, int(rng.uniform(0.3, 1) * seen.shape[1]))
        columns = rng.sample(range(seen.shape[1]), width)
        model = random_model(rng, is_regression)
        model.fit(seen[np.ix_(rows, columns)], target[rows])
        predicted.append(model.predict(hidden[:, columns]))
    return np.array(predicted), truth, is_regression, sizes


def scores(predicted, truth, is_regression, counts):
    """Scores (model, sample). counts (sample, row): how often a sample holds a row."""
    size = counts.sum(1)
    if not is_regression:
        return (predicted == truth).astype(float) @ counts.T / size
    error = (predicted - truth) ** 2 @ counts.T
    mean = counts @ truth / size
    return 1 - error / (counts @ truth**2 - size * mean**2)


# A rule gets arrays over the nodes, validation and selection scores, and the standard errors of the
# validation scores. It returns the index of the node it chooses; of equal ones the earliest.


def near_the_best(validation, errors):
    """Indices of the FINALISTS best nodes within one standard error of the best, in order."""
    best = validation.argmax()
    near = np.flatnonzero(validation >= validation[best] - errors[best])
    top = np.argsort(-validation[near], kind="stable")[:FINALISTS]
    return np.sort(near[top])


def by_validation(validation, selection, errors):
    return validation.argmax()


def earliest_near_the_best(validation, selection, errors):
    return np.flatnonzero(validation >= validation.max() - errors[validation.argmax()])[0]


def by_selection(validation, selection, errors):
    near = near_the_best(validation, errors)
    return near[selection[near].argmax()]


def by_mean(validation, selection, errors):
    near = near_the_best(validation, errors)
    return near[(validation + selection)[near].argmax()]


RULES = {
    "validation alone": by_validation,
    "earliest within one s.e.": earliest_near_the_best,
    "selection part alone": by_selection,
    "mean of both parts": by_mean,
}


def simulate(name):
    """(scores of each trial's nodes by rule, facts) of a task."""
    predicted, truth, is_regression, sizes = predictions(name)
    count = len(truth)
    rng = np.random.default_rng(0)
    true = scores(predicted, truth, is_regression, np.ones((1, count)))[:, 0]
    drawn = {}
    for part in PARTS:
        counts = rng.multinomial(sizes[part], np.full(count, 1 / count), TRIALS)
        drawn[part] = scores(predicted, truth, is_regression, counts)
    errors = drawn["validation"].std(axis=1)
    rows = []
    for nodes in NODES:
        chosen_by = {rule: [] for rule in RULES}
        for trial in range(TRIALS):
            chosen = rng.choice(MODELS, nodes, replace=False)
            parts = {part: drawn[part][chosen, trial] for part in PARTS}
            best = true[chosen].max()
            for rule, choose in RULES.items():
                index = choose(parts["validation"], parts["selection"], errors[chosen])
                regret = best - true[chosen[index]]
                chosen_by[rule].append((parts["test"][index], regret))
        rows += rows_of(f"{name}, {nodes} nodes", chosen_by)
    noise = {part: drawn[part].std(axis=1)[true.argmax()] for part in PARTS}
    text = ", ".join(f"{part} {sizes[part]} rows ± {noise[part]:.4f}" for part in PARTS)
    return rows, f"{name}: {text}"


def rows_of(what, chosen_by):
    """A row per rule: mean test score, regret, and its difference to that of validation alone."""
    base = np.array(chosen_by["validation alone"])
    rows = []
    for rule, values in chosen_by.items():
        test, regret = np.array(values).mean(axis=0)
        low, high = mean_interval(np.array(values)[:, 1] - base[:, 1])
        note = f"regret {(low + high) / 2:+.5f} ({low:+.5f} to {high:+.5f})"
        value = f"test {test:.4f}, regret {regret:.5f}"
        rows.append((f"{what}: {rule}", value, "" if rule == "validation alone" else note))
    return rows


def selection(args):
    """The rules on three tasks."""
    rows = []
    facts = []
    for name in ("titanic", "digits", "diabetes"):
        more, fact = simulate(name)
        rows += more
        facts.append((fact, "", "standard error of the best model's score by part"))
    headline = f"a simulation: {MODELS} real models, {TRIALS} trials, at most {FINALISTS} finalists"
    return headline, facts + rows

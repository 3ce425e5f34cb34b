//! Places that vanish, entirely or in part, while a writer has them open. What the store acknowledges
//! after that must load in a fresh handle.

use std::path::Path;

use super::{Plan, Report};
use crate::Outcome;
use crate::api::{self, Server, Store};
use crate::values;

/// What vanishes from a folder.
const FOLDER: [&str; 5] = ["everything", "the folder's content", "log", "ck", "repo.json"];
/// What vanishes from a bucket.
const BUCKET: [&str; 4] = ["everything", "/log/", "/ck/", "/repo.json"];

/// Tries each way of vanishing, in folders and on every server.
pub(crate) fn run(plan: &Plan) -> Outcome<Vec<Report>> {
    let mut reports = vec![];
    for what in FOLDER {
        reports.push(vanish(plan, None, what)?);
    }
    for server in &plan.servers {
        for what in BUCKET {
            reports.push(vanish(plan, Some(server), what)?);
        }
    }
    Ok(reports)
}

fn vanish(plan: &Plan, server: Option<&Server>, what: &str) -> Outcome<Report> {
    let name = server.map_or("folder", |s| &s.name);
    let (mut refused, mut saved, mut said, mut violations) = (0, 0, String::new(), vec![]);
    for round in 0..plan.rounds.min(10) {
        if !plan.goes_on() {
            break;
        }
        let scene = plan.scene(server)?;
        let store = Store::create(&scene.target)?;
        let values = |step| values::at(scene.seed(), step);
        let before = 1 + round as u64 % 4;
        for step in 0..before {
            store.save(step, &values(step))?;
        }
        match server {
            None => remove(Path::new(&scene.target.url), what)?,
            Some(_) => {
                let all = what == "everything";
                scene.target.delete_objects(|key| all || key.contains(what))?;
            }
        }
        for step in before..before + 3 {
            let id = match store.save(step, &values(step)) {
                Ok(checkpoint) => checkpoint.id(),
                Err(e) => {
                    refused += 1;
                    said = e.to_string();
                    continue;
                }
            };
            saved += 1;
            let restored = Store::open(&scene.target).and_then(|fresh| fresh.load(id));
            let wrong = match restored {
                Ok(found) => api::difference(scene.seed(), step, &found),
                Err(e) => Some(e.to_string()),
            };
            violations.extend(wrong.map(|wrong| {
                format!("{name} without {what}: step {step} was acknowledged into nothing: {wrong}")
            }));
        }
    }
    let line =
        format!("{name} without {what}: {refused} saves refused, {saved} done; it said: {said}");
    Ok(Report { line, violations })
}

fn remove(store: &Path, what: &str) -> Outcome<()> {
    let gone = match what {
        "everything" => store.to_owned(),
        "the folder's content" => {
            for entry in std::fs::read_dir(store)?.flatten() {
                remove_one(&entry.path())?;
            }
            return Ok(());
        }
        part => store.join(part),
    };
    remove_one(&gone)
}

fn remove_one(path: &Path) -> Outcome<()> {
    if path.is_dir() {
        return Ok(std::fs::remove_dir_all(path)?);
    }
    Ok(std::fs::remove_file(path)?)
}

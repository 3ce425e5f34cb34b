//! The life of a store in a folder, for tests that kill it: `store_life live FOLDER [no-fsync]` saves,
//! rebases, retires and sweeps, and says on standard output what was acknowledged;
//! `store_life judge FOLDER` reads such lines from standard input and checks that the folder keeps
//! what they promise. `tests/kill_points.py` and `tests/power_cuts.py` drive it.

use std::collections::BTreeSet;
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::time::Duration;

use object_store::local::LocalFileSystem;
use object_store::path::Path;
use s4_store::testing::{quick_options, toy};
use s4_store::{CheckOptions, Checkpoint, Place, Store, SweepOptions};

type Outcome = Result<(), Box<dyn std::error::Error>>;

const LEN: usize = 40;

/// The content of a step, made from its number so that a restore can be checked.
fn content(step: u64) -> Vec<u8> {
    (0..LEN as u64).map(|i| (step * 31 + i) as u8).collect()
}

/// Prints a promise: whoever reads the line may rely on it.
fn say(line: std::fmt::Arguments<'_>) -> Outcome {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

async fn save(
    store: &Store,
    step: u64,
    parent: Option<&Checkpoint>,
) -> Result<Checkpoint, Box<dyn std::error::Error>> {
    let base = content(parent.map_or(0, Checkpoint::step));
    let parent = parent.map(|p| (p.reference(), &base[..]));
    let saved = toy::save(store, step, parent, &content(step)).await?;
    say(format_args!("listed {} {step}", saved.id()))?;
    Ok(saved)
}

async fn live(folder: &str, fsync: bool) -> Outcome {
    let place = if fsync {
        Place::folder(folder)
    } else {
        std::fs::create_dir_all(folder)?;
        let store = LocalFileSystem::new_with_prefix(folder)?;
        Place::objects(Arc::new(store), Path::default())
    };
    let store = Store::open_or_create(&place, quick_options()).await?;
    let before = store.latest().await?.map_or(0, |c| c.step());
    let base = save(&store, before + 1, None).await?;
    let one = save(&store, before + 2, Some(&base)).await?;
    save(&store, before + 3, Some(&one)).await?;
    save(&store, before + 4, Some(&one)).await?;
    say(format_args!("replacing {}", one.id()))?;
    let full = store.rebase(one.id(), &mut toy::ToyRebaser::default()).await?;
    say(format_args!("listed {} {}", full.id(), full.step()))?;
    say(format_args!("retiring {}", base.id()))?;
    store.retire(&[base.id()], "life").await?;
    say(format_args!("retired {}", base.id()))?;
    let now = SweepOptions { grace: Duration::ZERO, exclusive: true, dry_run: false };
    let report = store.sweep(&now).await?;
    let failed = report.failed.first();
    failed.map_or(Ok(()), |(what, why)| Err(format!("{what}: {why}").into()))
}

async fn judge(folder: &str) -> Outcome {
    let (mut listed, mut leaving, mut retired) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let mut words = line.split(' ');
        let (verb, id) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        match verb {
            "listed" => listed.push(id.to_owned()),
            "retired" => drop(retired.insert(id.to_owned())),
            _ => drop(leaving.insert(id.to_owned())),
        }
    }
    let store = match Store::open(&Place::folder(folder), quick_options()).await {
        Err(s4_store::Error::NoStore { .. }) if listed.is_empty() => return Ok(()),
        other => other?,
    };
    let state = store.state().await?;
    for id in listed.iter().filter(|id| !leaving.contains(*id)) {
        if state.get(id.parse()?).is_none() {
            return Err(format!("{id} was acknowledged and is lost").into());
        }
    }
    for id in &retired {
        if state.get(id.parse()?).is_some() {
            return Err(format!("{id} was retired and is listed").into());
        }
    }
    for checkpoint in state.list() {
        let chain = toy::chain(&state, checkpoint)?;
        if toy::restore(&store, &chain).await? != content(checkpoint.step()) {
            return Err(format!("step {} is not what was saved", checkpoint.step()).into());
        }
    }
    let all = CheckOptions { read_data: true, ..CheckOptions::default() };
    let report = store.check(&all, None).await?;
    if !report.is_clean() || !report.void.is_empty() {
        return Err(format!("{report:?}").into());
    }
    // The folder is still usable.
    save(&store, 1000, None).await?;
    Ok(())
}

fn main() -> Outcome {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    // One thread for blocking calls, so that system calls come in a fixed order.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(1)
        .build()?;
    match words[..] {
        ["live", folder] => runtime.block_on(live(folder, true)),
        ["live", folder, "no-fsync"] => runtime.block_on(live(folder, false)),
        ["judge", folder] => runtime.block_on(judge(folder)),
        _ => Err("usage: store_life live|judge FOLDER [no-fsync]".into()),
    }
}

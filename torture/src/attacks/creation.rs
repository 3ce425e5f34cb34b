//! Creates stores through a faulty network, on servers that honour conditional writes. Each store must
//! be for many writers, or creation must fail: a store silently marked for one writer loses
//! acknowledged saves later.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use s4_store::testing::Random;
use s4weights::Error;

use super::{Plan, Report, Scene, side_by_side};
use crate::Outcome;
use crate::api::{self, Store, Target};
use crate::proxy::{Behaviour, Fault, Proxy};
use crate::values;

/// Creations at the same time, on each server.
const SIDE_BY_SIDE: usize = 3;
/// The longest that a creation may take.
const PATIENCE: Duration = Duration::from_secs(240);
/// About how many requests a creation makes: where a single fault may hit.
const REQUESTS: u64 = 200;
/// The first requests, which look for a store and probe whether conditions are honoured.
const FIRST: u64 = 6;
/// Creators at the same time, in every tenth try.
const CREATORS: usize = 3;

/// The outcomes of the creations on one server.
#[derive(Default)]
struct Tally {
    outcomes: BTreeMap<&'static str, usize>,
    example: Option<String>,
    violations: Vec<String>,
}

/// Shares the creations among the servers.
pub(crate) fn run(plan: &Plan) -> Outcome<Vec<Report>> {
    let share = plan.rounds.div_ceil(plan.servers.len().max(1));
    side_by_side(&plan.servers, |server| {
        let (next, tally) = (AtomicUsize::new(0), Mutex::new(Tally::default()));
        side_by_side(&[(); SIDE_BY_SIDE], |()| {
            let proxy = Proxy::start(server, plan.seed, Behaviour::honest())?;
            loop {
                let number = next.fetch_add(1, Ordering::SeqCst);
                if number >= share || !plan.goes_on() {
                    return Ok(vec![]);
                }
                let scene = plan.scene(Some(server))?;
                create(&scene, &proxy, number, &tally)?;
            }
        })?;
        let Tally { outcomes, example, violations } =
            tally.into_inner().unwrap_or_else(|e| e.into_inner());
        let counts: Vec<_> = outcomes.iter().map(|(what, n)| format!("{n} {what}")).collect();
        let mut line = format!("{}: {}", server.name, counts.join(", "));
        if let Some(example) = example {
            line = format!("{line}; a failure: {example}");
        }
        Ok(vec![Report { line, violations }])
    })
}

/// Creates one store: with one fault somewhere, or with many.
fn create(scene: &Scene, proxy: &Proxy, number: usize, tally: &Mutex<Tally>) -> Outcome<()> {
    let mut random = Random::new(scene.seed());
    let faults = Fault::QUICK;
    let one = number.is_multiple_of(2);
    let behaviour = if one {
        let fault = faults[random.below(faults.len() as u64) as usize];
        // The first requests decide the most.
        let end = [FIRST, REQUESTS][random.below(2) as usize];
        Behaviour::once(random.below(end), fault)
    } else {
        Behaviour::faulty(&faults, [4, 12, 40][random.below(3) as usize])
    };
    let what = format!("creation {number} under {behaviour:?}");
    proxy.behave(behaviour);
    let started = Instant::now();
    let through = scene.target.through(&proxy.url());
    let (created, mut wrong) = match number % 10 {
        3 => several(&through),
        _ => (Store::create(&through), vec![]),
    };
    let took = started.elapsed();
    let requests = proxy.requests();
    proxy.behave(Behaviour::honest());
    if took > PATIENCE {
        wrong.push(format!("took {took:?}"));
    }
    let outcome = match (&created, one) {
        (Ok(store), _) if !store.is_for_many() => {
            wrong.push(format!("is silently for one writer (after {requests} requests)"));
            "silently for one writer"
        }
        (Ok(_), true) => "created with one fault",
        (Ok(_), false) => "created with many faults",
        (Err(_), true) => "failed with one fault",
        (Err(_), false) => "failed with many faults",
    };
    wrong.extend(what_is_there(scene, created.is_ok(), number)?);
    let mut tally = tally.lock().unwrap_or_else(|e| e.into_inner());
    *tally.outcomes.entry(outcome).or_default() += 1;
    if let Err(e) = created {
        tally.example.get_or_insert_with(|| e.to_string());
    }
    tally.violations.extend(wrong.into_iter().map(|w| format!("{what}: {w}")));
    Ok(())
}

/// Several creators find no store at the same time. Those that get one must get the same; returns
/// one of them.
fn several(target: &Target) -> (Result<Store, Error>, Vec<String>) {
    let mut opened: Vec<_> = std::thread::scope(|s| {
        let running: Vec<_> =
            (0..CREATORS).map(|_| s.spawn(|| Store::open_or_create(target))).collect();
        running.into_iter().filter_map(|r| r.join().ok()).collect()
    });
    let mut ids: Vec<_> = opened.iter().flatten().map(Store::id).collect();
    ids.dedup();
    let wrong = match ids.len() {
        0 | 1 => vec![],
        n => vec![format!("{n} stores were created at one place")],
    };
    opened.sort_by_key(Result::is_err);
    (opened.swap_remove(0), wrong)
}

/// Looks at the place without faults. Returns what is wrong there.
fn what_is_there(scene: &Scene, created: bool, number: usize) -> Outcome<Vec<String>> {
    let store = match Store::open(&scene.target) {
        Err(e) if api::is_no_store(&e) && !created => {
            // The leftovers of a failed creation must not prevent another try.
            if number % 5 != 1 {
                return Ok(vec![]);
            }
            match Store::open_or_create(&scene.target) {
                Ok(store) => store,
                Err(e) => return Ok(vec![format!("another try without faults fails: {e}")]),
            }
        }
        Err(e) => return Ok(vec![format!("what was created cannot be opened: {e}")]),
        Ok(store) => store,
    };
    if !store.is_for_many() {
        return Ok(vec!["what is there is for one writer".into()]);
    }
    if number.is_multiple_of(10) {
        let saved = store.save(1, &values::at(scene.seed(), 1))?;
        let wrong = api::difference(scene.seed(), 1, &store.load(saved.id())?);
        return Ok(wrong.into_iter().collect());
    }
    Ok(vec![])
}

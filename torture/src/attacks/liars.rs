//! Servers that do not honour conditional writes: they ignore the condition, or check it first and
//! write later. Creating a store there must fail, unless the user promises a single writer; and then
//! a second writer must be refused before it does any harm.

use std::time::{Duration, Instant};

use super::storm::Crowd;
use super::{Plan, Report, Scene, side_by_side};
use crate::Outcome;
use crate::api::{self, Protocol, Server, Store};
use crate::judge::Verdict;
use crate::proxy::{Behaviour, Condition, Proxy};

/// The longest time in seconds that writers use a store which should not exist.
const STORM: u64 = 8;
/// How long two writers try to use a store for one writer at the same time: long enough for a lease to be renewed.
const OVERLAP: Duration = Duration::from_secs(25);
/// Time in which the lease of a killed writer must expire.
const TAKEOVER: Duration = Duration::from_secs(120);
/// A server that pauses at least this long between check and write must be detected.
const PLAIN: Duration = Duration::from_millis(10);

/// A lie, and its name.
struct Lie {
    name: String,
    /// The server, and in the next field, how a proxy makes it treat conditions; `None` for a server that lies
    /// without a proxy.
    server: Server,
    condition: Option<Condition>,
}

fn storm(plan: &Plan) -> Duration {
    Duration::from_secs(STORM.min(1 + plan.rounds as u64))
}

/// Tries every lie on every server, `plan.rounds` times each.
pub(crate) fn run(plan: &Plan) -> Outcome<Vec<Report>> {
    let check = |millis| Condition::CheckThenWrite(Duration::from_millis(millis));
    let mut lies = vec![];
    // Azure's signatures cover the condition, so that no proxy can take it away.
    let servers = || plan.servers.iter().filter(|s| s.protocol == Protocol::S3);
    for server in servers() {
        for condition in [Condition::Ignored, check(0), check(2), check(10), check(50)] {
            let name = format!("{}, {condition:?}", server.name);
            lies.push(Lie { name, server: server.clone(), condition: Some(condition) });
        }
    }
    if let Some(racing) = &plan.racing {
        let name = "a server that races by itself".to_owned();
        let server = Server { name: name.clone(), protocol: Protocol::S3, address: racing.clone() };
        lies.push(Lie { name, server, condition: None });
    }
    let mut reports = vec![];
    // Two at a time: load changes what a probe sees.
    for few in lies.chunks(2) {
        reports.extend(side_by_side(few, |lie| Ok(vec![many(plan, lie)?]))?);
    }
    // A lease takes a minute to expire, too long for a small version.
    if plan.rounds > 1 {
        for server in servers() {
            reports.push(single(plan, server)?);
            reports.push(turncoat(plan, server)?);
        }
    }
    Ok(reports)
}

/// Creates stores with default options, and has four writers use those that should not exist.
fn many(plan: &Plan, lie: &Lie) -> Outcome<Report> {
    let (mut refused, mut failed, mut fooled, mut lost) = (0, 0, 0, 0);
    let mut violations = vec![];
    let mut said = String::new();
    for _ in 0..plan.rounds {
        if !plan.goes_on() {
            break;
        }
        let mut scene = plan.scene(Some(&lie.server))?;
        let behaviour = lie.condition.map_or(Behaviour::honest(), Behaviour::lying);
        let proxy = Proxy::start(&lie.server, scene.seed(), behaviour)?;
        let through = scene.target.through(&proxy.url());
        match Store::create(&through) {
            Err(e) if api::is_refusal(&e) => {
                refused += 1;
                said = e.to_string();
            }
            Err(e) => {
                failed += 1;
                said = e.to_string();
            }
            Ok(store) => {
                fooled += 1;
                let plain = match lie.condition {
                    Some(Condition::CheckThenWrite(pause)) => pause >= PLAIN,
                    _ => true,
                };
                match store.is_for_many() {
                    false => violations.push("a store for one writer that nobody asked for".into()),
                    true if plain => violations.push("it was taken for an honest server".into()),
                    true => {}
                }
                drop(store);
                let mut crowd = Crowd::gather(&mut scene, through.clone(), &[])?;
                std::thread::sleep(storm(plan));
                scene.finish(&mut crowd.processes)?;
                // Judged through the proxy: another address would be probed again.
                scene.target = through;
                let verdict = scene.judge()?;
                lost += verdict.violations.len();
                violations.extend(verdict.violations);
            }
        }
    }
    let line = format!(
        "{}: {refused} creations refused, {failed} failed, {fooled} stores created, {lost} \
         promises broken in these; it said: {said}",
        lie.name
    );
    Ok(Report { line, violations })
}

/// The user asked for a single writer; a second one comes anyway.
fn single(plan: &Plan, server: &Server) -> Outcome<Report> {
    let mut scene = plan.scene(Some(server))?;
    let proxy = Proxy::start(server, scene.seed(), Behaviour::lying(Condition::Ignored))?;
    let through = scene.target.through(&proxy.url());
    let store = Store::create_single(&through)?;
    let mut violations = vec![];
    if store.is_for_many() {
        violations.push("a store for one writer is marked as one for many".into());
    }
    drop(store);
    let mut writers = vec![scene.start("writer", &through)?, scene.start("writer", &through)?];
    std::thread::sleep(OVERLAP);
    // The lease of a killed writer must expire: after both are killed, a third one gets in.
    for writer in &mut writers {
        writer.kill()?;
    }
    writers.push(scene.start("writer", &through)?);
    let third = |scene: &Scene| scene.evidence().map(|e| e.saved().any(|(_, s)| s / 100_000 == 3));
    let end = Instant::now() + TAKEOVER;
    while !third(&scene)? && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(500));
    }
    let taken_over = third(&scene)?;
    scene.finish(&mut writers)?;
    scene.target = through;
    let evidence = scene.evidence()?;
    let by = |n: u64| evidence.saved().filter(|(_, step)| step / 100_000 == n).count();
    let refusal = evidence.failures().find(|why| why.starts_with("save")).unwrap_or("nothing");
    let what = format!(
        "{}, single by choice: one writer had {} saves acknowledged, the other {}, which was told: \
         {refusal}",
        server.name,
        by(1),
        by(2)
    );
    if !taken_over {
        violations.push(format!("no writer was let in within {TAKEOVER:?} after a kill"));
    }
    // Both may have saved, one after the other: what counts is that neither undid the other's saves.
    let mut verdict = scene.judge()?;
    verdict.violations.extend(violations);
    Ok(Report::of(&what, verdict))
}

/// An honest server that starts to check and then write after it was probed. No store can promise
/// anything there: losses are reported, and are no violations.
fn turncoat(plan: &Plan, server: &Server) -> Outcome<Report> {
    let mut scene = plan.scene(Some(server))?;
    let proxy = Proxy::start(server, scene.seed(), Behaviour::honest())?;
    let through = scene.target.through(&proxy.url());
    drop(Store::create(&through)?);
    let pause = Duration::from_millis(20);
    proxy.behave(Behaviour::lying(Condition::CheckThenWrite(pause)));
    let started = Instant::now();
    let mut crowd = Crowd::gather(&mut scene, through.clone(), &[])?;
    std::thread::sleep(storm(plan));
    scene.finish(&mut crowd.processes)?;
    scene.target = through;
    let seconds = started.elapsed().as_secs();
    let Verdict { saved, violations, .. } = scene.judge()?;
    let first = violations.first().and_then(|v| v.lines().next()).unwrap_or("nothing");
    let line = format!(
        "{}, dishonest only after the probe: of {saved} saves acknowledged in {seconds} s, {} \
         promises broken (for information): {first}",
        server.name,
        violations.len()
    );
    Ok(Report { line, violations: vec![] })
}

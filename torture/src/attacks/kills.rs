//! A training process that is killed again and again at random moments: while it creates its store,
//! resumes, or saves. Each time another one resumes.

use std::time::{Duration, Instant};

use s4_store::testing::Random;

use super::{Plan, Report, Scene, side_by_side};
use crate::Outcome;
use crate::api::Server;
use crate::judge::Verdict;

/// Kills of one store.
const KILLS: usize = 25;
/// Time for a process to open its store.
const OPENING: Duration = Duration::from_secs(120);

/// Does half of the kills in folders, half on the servers.
pub(crate) fn run(plan: &Plan) -> Outcome<Vec<Report>> {
    let mut lanes = vec![(None, plan.rounds)];
    if !plan.servers.is_empty() {
        lanes[0].1 = plan.rounds.div_ceil(2);
        let each = (plan.rounds / 2).div_ceil(plan.servers.len());
        lanes.extend(plan.servers.iter().map(|server| (Some(server), each)));
    }
    let reports = side_by_side(&lanes, |&(server, kills)| {
        lane(plan, server, kills).map(|report| vec![report])
    })?;
    if reports.iter().any(|r| !r.violations.is_empty()) {
        plan.keep()?;
    }
    Ok(reports)
}

fn lane(plan: &Plan, server: Option<&Server>, kills: usize) -> Outcome<Report> {
    let mut random = Random::new(plan.seed ^ kills as u64);
    let (mut done, mut total, mut failures) = (0, Verdict::default(), 0);
    while done < kills && plan.goes_on() {
        let mut scene = plan.scene(server)?;
        let these = KILLS.min(kills - done);
        for _ in 0..these {
            kill_one(&mut scene, &mut random)?;
        }
        done += these;
        failures += scene.evidence()?.failures().count();
        let Verdict { saved, listed, gone, violations } = scene.judge()?;
        total.saved += saved;
        total.listed += listed;
        total.gone += gone;
        total.violations.extend(violations);
    }
    let name = server.map_or("folder", |s| &s.name);
    Ok(Report::of(&format!("{name}: {done} kills, {failures} calls failed"), total))
}

/// Starts a trainer and kills it: mostly when it has opened its store, sometimes before.
fn kill_one(scene: &mut Scene, random: &mut Random) -> Outcome<()> {
    let opened = || scene.evidence().map(|e| e.opened());
    let before = opened()?;
    let target = scene.target.clone();
    let mut trainer = scene.start("trainer", &target)?;
    if !random.one_in(5) {
        let end = Instant::now() + OPENING;
        while scene.evidence()?.opened() == before && Instant::now() < end && !trainer.has_ended() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    std::thread::sleep(Duration::from_millis(random.below(1200)));
    Ok(trainer.kill()?)
}

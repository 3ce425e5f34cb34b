//! Four writers and a sweeper on one store, through a network that loses, delays and duplicates
//! requests and answers, while the processes are killed and paused.

use std::time::{Duration, Instant};

use s4_store::testing::Random;

use super::{Plan, Report, Scene, side_by_side};
use crate::Outcome;
use crate::api::{Server, Store, Target};
use crate::children::Process;
use crate::proxy::{Behaviour, Fault, Proxy};
use crate::roles::GRACE;

const WRITERS: usize = 4;
/// Attacks on processes before the network's behaviour changes.
const SPELL: usize = 4;

/// Shares the operations among the servers.
pub(crate) fn run(plan: &Plan) -> Outcome<Vec<Report>> {
    let share = plan.rounds.div_ceil(plan.servers.len().max(1));
    let reports = side_by_side(&plan.servers, |server| {
        storm(plan, server, share).map(|report| vec![report])
    })?;
    if reports.iter().any(|r| !r.violations.is_empty()) {
        plan.keep()?;
    }
    Ok(reports)
}

fn storm(plan: &Plan, server: &Server, operations: usize) -> Outcome<Report> {
    let mut scene = plan.scene(Some(server))?;
    let proxy = Proxy::start(server, scene.seed(), Behaviour::honest())?;
    let through = scene.target.through(&proxy.url());
    // Creating under faults is an attack of its own.
    drop(Store::create(&through)?);
    let mut random = Random::new(!scene.seed());
    let mut crowd = Crowd::gather(&mut scene, through, &["sweeper"])?;
    while scene.evidence()?.operations() < operations && plan.goes_on() {
        proxy.behave(weather(&mut random));
        for _ in 0..SPELL {
            crowd.hurt_one(&mut scene)?;
        }
    }
    proxy.behave(Behaviour::honest());
    scene.finish(&mut crowd.processes)?;
    let evidence = scene.evidence()?;
    let what = format!(
        "{}: {} operations ({} failed), {} faults, {} kills, {} pauses",
        server.name,
        evidence.operations(),
        evidence.failures().count(),
        proxy.faults(),
        crowd.kills,
        crowd.pauses
    );
    let mut verdict = scene.judge()?;
    for violation in &mut verdict.violations {
        let id = violation.split(' ').next().unwrap_or_default().to_owned();
        let faults = proxy.about(&id);
        violation.extend(faults.iter().take(20).map(|line| format!("\n    proxy: {line}")));
    }
    Ok(Report::of(&what, verdict))
}

/// Behaviour of the network for a while: from one fault in 4 requests, when hardly anything works,
/// to one in 60.
fn weather(random: &mut Random) -> Behaviour {
    let one_in = [4, 8, 20, 60][random.below(4) as usize];
    let mut behaviour = Behaviour::faulty(&Fault::ALL, one_in);
    behaviour.outage_one_in = 800;
    behaviour
}

/// Writers and others at work on one store, each replaced when it is killed.
pub(crate) struct Crowd {
    pub(crate) processes: Vec<Process>,
    roles: Vec<&'static str>,
    through: Target,
    random: Random,
    kills: usize,
    pauses: usize,
}

impl Crowd {
    /// Starts the writers and `others`.
    pub(crate) fn gather(
        scene: &mut Scene,
        through: Target,
        others: &[&'static str],
    ) -> Outcome<Self> {
        let roles: Vec<_> = [&["writer"; WRITERS], others].concat();
        let started = roles.iter().map(|role| scene.start(role, &through));
        let processes = started.collect::<Outcome<_>>()?;
        let random = Random::new(scene.seed());
        Ok(Self { processes, roles, through, random, kills: 0, pauses: 0 })
    }

    /// Waits a moment, then kills one process, or pauses it for longer than a sweep waits.
    fn hurt_one(&mut self, scene: &mut Scene) -> Outcome<()> {
        std::thread::sleep(Duration::from_millis(300 + self.random.below(2000)));
        let one = self.random.below(self.processes.len() as u64) as usize;
        match self.random.below(3) {
            0 => {
                self.processes[one].kill()?;
                self.kills += 1;
            }
            1 => {
                let until = Instant::now() + GRACE + Duration::from_secs(1);
                self.processes[one].pause()?;
                self.pauses += 1;
                std::thread::sleep(until.saturating_duration_since(Instant::now()));
                self.processes[one].go_on()?;
            }
            _ => {}
        }
        for (process, role) in self.processes.iter_mut().zip(&self.roles) {
            if process.has_ended() {
                *process = scene.start(role, &self.through)?;
            }
        }
        Ok(())
    }
}

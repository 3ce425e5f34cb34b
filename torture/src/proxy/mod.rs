//! An HTTP/1.1 proxy that injects faults in front of a real server.
//!
//! It reads each request completely and draws its fate from a seeded generator, so that a fault hits a
//! request at a known point and not at some byte of a stream.

mod fault;
mod http;

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use s4_store::testing::Random;
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::time::{Instant, sleep, timeout};

use crate::api::{Protocol, Server};

pub(crate) use fault::{Behaviour, Condition, Fault};
use http::{Request, Response};

/// Time for a server to answer.
const PATIENCE: Duration = Duration::from_secs(120);
/// Faults that are remembered for a history.
const REMEMBERED: usize = 20_000;

/// A running proxy. Dropped, it stops.
pub(crate) struct Proxy {
    shared: Arc<Shared>,
    address: SocketAddr,
    _runtime: Runtime,
}

struct Shared {
    server: SocketAddr,
    protocol: Protocol,
    state: Mutex<State>,
}

struct State {
    behaviour: Behaviour,
    random: Random,
    requests: u64,
    down_until: Option<Instant>,
    faults: BTreeMap<Fault, u64>,
    history: Vec<String>,
}

/// How a request ends for the client.
enum Fate {
    /// The client gets an answer.
    Answer(Vec<u8>),
    /// The client gets these bytes, and then the end of the connection.
    Part(Vec<u8>),
    /// The connection is reset.
    Reset,
    /// The connection ends.
    Close,
}

impl Proxy {
    /// Starts a proxy in front of a server on a free port.
    ///
    /// # Errors
    /// If the address is invalid, or the system has no port or thread left.
    pub(crate) fn start(server: &Server, seed: u64, behaviour: Behaviour) -> io::Result<Self> {
        let Server { protocol, address, .. } = server;
        let bad = |_| io::Error::new(ErrorKind::InvalidInput, format!("{address}: no address"));
        let server = address.trim_start_matches("http://").parse().map_err(bad)?;
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let listener = runtime.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))?;
        let address = listener.local_addr()?;
        let state = State {
            behaviour,
            random: Random::new(seed),
            requests: 0,
            down_until: None,
            faults: BTreeMap::new(),
            history: Vec::new(),
        };
        let shared = Arc::new(Shared { server, protocol: *protocol, state: Mutex::new(state) });
        let accepting = Arc::clone(&shared);
        runtime.spawn(async move {
            loop {
                // A connection that was reset before it was accepted is an error, too.
                if let Ok((client, _)) = listener.accept().await {
                    tokio::spawn(serve(Arc::clone(&accepting), client));
                }
            }
        });
        Ok(Self { shared, address, _runtime: runtime })
    }

    /// The address for clients.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Changes what happens from now on, and counts requests from 0 again.
    pub(crate) fn behave(&self, behaviour: Behaviour) {
        let mut state = self.shared.lock();
        state.behaviour = behaviour;
        state.requests = 0;
    }

    /// Requests since the behaviour was last changed.
    pub(crate) fn requests(&self) -> u64 {
        self.shared.lock().requests
    }

    /// Faults so far, all kinds together.
    pub(crate) fn faults(&self) -> u64 {
        self.shared.lock().faults.values().sum()
    }

    /// The faults that hit requests which mention `word`, oldest first.
    pub(crate) fn about(&self, word: &str) -> Vec<String> {
        self.shared.lock().history.iter().filter(|line| line.contains(word)).cloned().collect()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Decides what happens to a request.
    fn decide(&self, request: &Request) -> (Option<Fault>, Condition, u64) {
        let mut state = self.lock();
        let number = state.requests;
        state.requests += 1;
        let extra = state.random.below(1000);
        let State { behaviour, random, .. } = &mut *state;
        let mut fault = behaviour.draw(number, random);
        if behaviour.outage_one_in > 0 && random.one_in(behaviour.outage_one_in) {
            state.down_until = Some(Instant::now() + Duration::from_millis(extra * 3));
        }
        if state.down_until.is_some_and(|until| Instant::now() < until) {
            fault = Some(Fault::ResetBefore);
        }
        if let Some(fault) = fault {
            *state.faults.entry(fault).or_default() += 1;
            if state.history.len() < REMEMBERED {
                let line = format!("{fault:?}: {} {}", request.method, request.target);
                state.history.push(line);
            }
        }
        (fault, state.behaviour.condition, extra)
    }

    async fn fate(self: &Arc<Self>, request: Request) -> io::Result<Fate> {
        let (fault, condition, extra) = self.decide(&request);
        // Faults that make sense only for writes become simpler ones for reads. By 409 S3 says that a
        // conditional write should be repeated, Azure that the object exists.
        let write = request.method == "PUT";
        let repeats = write && self.protocol == Protocol::S3;
        let fault = match fault {
            Some(Fault::Duplicate | Fault::LandsLate) if !write => Some(Fault::ResetBefore),
            Some(Fault::StatusBefore(409)) if !repeats => Some(Fault::StatusBefore(503)),
            Some(Fault::StatusAfter(409)) if !repeats => Some(Fault::StatusAfter(503)),
            other => other,
        };
        let method = request.method.clone();
        let status = |code: u16| {
            let name = match code {
                409 => "ConditionalRequestConflict",
                503 if self.protocol == Protocol::Azure => "ServerBusy",
                503 => "SlowDown",
                _ => "InternalError",
            };
            Fate::Answer(Response::error(code, name).to_bytes(&method))
        };
        let pause = Duration::from_millis(extra / 3);
        let long = Duration::from_millis(1000 + extra * 2);
        let answer = match fault {
            Some(Fault::ResetBefore) => return Ok(Fate::Reset),
            Some(Fault::StatusBefore(code)) => return Ok(status(code)),
            Some(Fault::StallBefore) => {
                sleep(long).await;
                return Ok(Fate::Close);
            }
            Some(Fault::LandsLate) => {
                self.land_later(request, condition, long);
                return Ok(Fate::Reset);
            }
            Some(Fault::DelayBefore) => {
                sleep(pause).await;
                self.forward(request, condition).await?
            }
            Some(Fault::Duplicate) => {
                self.land_later(request.clone(), condition, long);
                self.forward(request, condition).await?
            }
            _ => self.forward(request, condition).await?,
        };
        let bytes = answer.to_bytes(&method);
        Ok(match fault {
            Some(Fault::ResetAfter) => Fate::Reset,
            Some(Fault::NoAnswer) => Fate::Close,
            Some(Fault::StatusAfter(code)) => status(code),
            Some(Fault::Truncate) => Fate::Part(bytes[..bytes.len() / 2].to_vec()),
            Some(Fault::StallAfter) => {
                sleep(long).await;
                Fate::Close
            }
            Some(Fault::DelayAfter) => {
                sleep(pause).await;
                Fate::Answer(bytes)
            }
            _ => Fate::Answer(bytes),
        })
    }

    fn land_later(self: &Arc<Self>, request: Request, condition: Condition, after: Duration) {
        let shared = Arc::clone(self);
        tokio::spawn(async move {
            sleep(after).await;
            // Nobody waits for the answer.
            let _ = shared.forward(request, condition).await;
        });
    }

    /// Forwards a request, treating its condition as the behaviour says.
    async fn forward(&self, request: Request, condition: Condition) -> io::Result<Response> {
        const HEADER: &str = "if-none-match";
        if request.method != "PUT" || request.header(HEADER).is_none() {
            return self.send(&request).await;
        }
        match condition {
            Condition::Honoured => self.send(&request).await,
            Condition::Ignored => self.send(&request.without(HEADER)).await,
            Condition::CheckThenWrite(pause) => {
                if self.send(&request.head()).await?.status == 200 {
                    return Ok(Response::error(412, "PreconditionFailed"));
                }
                sleep(pause).await;
                self.send(&request.without(HEADER)).await
            }
        }
    }

    async fn send(&self, request: &Request) -> io::Result<Response> {
        let exchange = async {
            let mut server = TcpStream::connect(self.server).await?;
            server.write_all(&request.to_bytes()).await?;
            Response::read(&mut BufReader::new(server), &request.method).await
        };
        timeout(PATIENCE, exchange).await.map_err(|_| io::Error::from(ErrorKind::TimedOut))?
    }
}

/// Serves one connection for as long as the client keeps it and no fault ends it.
async fn serve(shared: Arc<Shared>, client: TcpStream) {
    let mut client = BufReader::new(client);
    // A request that cannot be read, or that the server does not answer, ends the connection.
    while let Ok(Some(request)) = Request::read(&mut client).await {
        let fate = shared.fate(request).await.unwrap_or(Fate::Close);
        match fate {
            Fate::Answer(bytes) => match client.get_mut().write_all(&bytes).await {
                Ok(()) => {}
                Err(_) => return,
            },
            Fate::Part(bytes) => {
                let _ = client.get_mut().write_all(&bytes).await;
                let _ = client.get_mut().shutdown().await;
                return;
            }
            Fate::Reset => {
                let _ = client.get_ref().set_zero_linger();
                return;
            }
            Fate::Close => return,
        }
    }
}

//! A server that answers as a test wants.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A request that the server received.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) head: String,
    pub(crate) body: String,
}

/// The reply, which is sent after a pause.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
    pub(crate) pause: Duration,
}

impl Reply {
    pub(crate) fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, body: body.into(), pause: Duration::ZERO }
    }
}

pub(crate) struct Server {
    pub(crate) url: String,
    pub(crate) seen: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    /// Starts a server, whose thread ends with the process.
    pub(crate) fn start(answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let seen = Arc::new(Mutex::new(vec![]));
        let (answer, notes) = (Arc::new(answer), Arc::clone(&seen));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (answer, notes) = (Arc::clone(&answer), Arc::clone(&notes));
                std::thread::spawn(move || {
                    // A client may go away at any time.
                    let _ = serve(stream, &*answer, &notes);
                });
            }
        });
        Self { url, seen }
    }

    pub(crate) fn asked(&self, path: &str) -> usize {
        self.seen.lock().unwrap().iter().filter(|r| r.path == path).count()
    }
}

fn serve(
    mut stream: TcpStream,
    answer: &dyn Fn(&Request) -> Reply,
    notes: &Mutex<Vec<Request>>,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head)? == 0 {
            return Ok(());
        }
    }
    let length = head.lines().find_map(|l| {
        let (name, value) = l.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
    });
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body)?;
    let mut words = head.split(' ');
    let word = |w: Option<&str>| w.unwrap_or_default().to_owned();
    let (method, path) = (word(words.next()), word(words.next()));
    let body = String::from_utf8_lossy(&body).into_owned();
    let request = Request { method, path, head, body };
    notes.lock().unwrap().push(request.clone());
    let reply = answer(&request);
    std::thread::sleep(reply.pause);
    let head = format!(
        "HTTP/1.1 {} X\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        reply.status,
        reply.body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(&reply.body)
}

//! A line to a server that a test can cut, slow down, or have answered by somebody else.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What happens to requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Requests are passed on.
    None,
    /// Connections are closed immediately.
    Cut,
    /// Requests are passed on at this many bytes a second.
    Slow(u32),
    /// Requests that write are answered with this status and code.
    Refused(u16, &'static str),
    /// All requests are answered with this status and code.
    RefusedAll(u16, &'static str),
}

/// The line; its threads end with the process.
pub(crate) struct Line {
    pub(crate) url: String,
    fault: Arc<Mutex<Fault>>,
}

impl Line {
    /// A line to the server at `http://host:port`.
    pub(crate) fn to(server: &str) -> Self {
        let server = server.trim_start_matches("http://").trim_end_matches('/').to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let fault = Arc::new(Mutex::new(Fault::None));
        let now = Arc::clone(&fault);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (now, server) = (Arc::clone(&now), server.clone());
                std::thread::spawn(move || {
                    let fault = *now.lock().unwrap();
                    // Either end may close the connection at any time.
                    let _ = pass_on(&stream, &server, fault);
                });
            }
        });
        Self { url, fault }
    }

    pub(crate) fn set(&self, fault: Fault) {
        *self.fault.lock().unwrap() = fault;
    }
}

/// Passes on the one request of a connection.
fn pass_on(mut client: &TcpStream, server: &str, fault: Fault) -> std::io::Result<()> {
    if fault == Fault::Cut {
        return Ok(());
    }
    let mut reader = BufReader::new(client);
    let (mut head, mut length) = (vec![], 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let lower = line.to_ascii_lowercase();
        if let Some(value) = lower.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap_or(0);
        }
        if line == "\r\n" {
            break;
        }
        if !lower.starts_with("connection:") {
            head.push(line);
        }
    }
    let mut body = vec![0; length];
    let writes = head[0].starts_with("PUT") || head[0].starts_with("POST");
    match fault {
        Fault::Refused(status, code) if writes => {
            reader.read_exact(&mut body)?;
            return refuse(client, status, code);
        }
        Fault::RefusedAll(status, code) => {
            reader.read_exact(&mut body)?;
            return refuse(client, status, code);
        }
        Fault::Slow(rate) => {
            for piece in body.chunks_mut(rate as usize / 20) {
                reader.read_exact(piece)?;
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        _ => reader.read_exact(&mut body)?,
    }
    let mut upstream = TcpStream::connect(server)?;
    upstream.write_all(head.concat().as_bytes())?;
    upstream.write_all(b"connection: close\r\n\r\n")?;
    upstream.write_all(&body)?;
    let mut answer = vec![];
    upstream.read_to_end(&mut answer)?;
    client.write_all(&answer)
}

fn refuse(mut client: &TcpStream, status: u16, code: &str) -> std::io::Result<()> {
    let body = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code></Error>");
    write!(
        client,
        "HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-type: application/xml\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

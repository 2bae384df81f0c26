//! The RPCs of `process.Process`.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use aenv_envd_proto::{
    http::OFFSET,
    oneof::{Input as ProtoInput, Selector as ProtoSelector, StreamInputEvent},
    process::{
        CloseStdinRequest, CloseStdinResponse, ConnectRequest, ConnectResponse, ListRequest, ListResponse,
        PTY, Process as Rpc, ProcessEvent, ProcessInfo, ProcessInput, ProcessSelector, SendInputRequest,
        SendInputResponse, SendSignalRequest, SendSignalResponse, Signal, StartRequest, StartResponse,
        StreamInputRequest, StreamInputResponse, UpdateRequest, UpdateResponse,
    },
};
use connectrpc::{
    ConnectError, Encodable, InboundStream, RequestContext, Response, ServiceRequest, ServiceResult,
    ServiceStream,
};
use futures_util::StreamExt;
use http::HeaderMap;
use tokio::io::AsyncWriteExt;

use super::{
    Input, Process, Processes, Selector,
    launch::Launch,
    listen::{Attached, keepalive},
    pty::Size,
};
use crate::{
    credentials, environment,
    server::connect::{Violation, time_limit},
};

/// How long input may wait for a process to read it when the caller set no time limit.
const INPUT_WAIT: Duration = Duration::from_secs(60);

/// The service, as the router wants it.
pub(crate) struct Service(pub(crate) Arc<Processes>);

impl Service {
    fn attached(
        &self,
        headers: &HeaderMap,
        pid: u32,
        listener: super::spool::Listener,
        deadline: Option<Instant>,
    ) -> Result<Attached, ConnectError> {
        Ok(Attached {
            pid,
            listener,
            with_offsets: headers.contains_key(OFFSET),
            keepalive: keepalive(headers)?,
            deadline,
            generation: self.0.guest.generation(),
        })
    }
}

impl Rpc for Service {
    async fn list<'a>(
        &'a self,
        _: RequestContext,
        _: ServiceRequest<'_, ListRequest>,
    ) -> ServiceResult<impl Encodable<ListResponse> + Send + use<'a>> {
        let mut processes: Vec<_> = self
            .0
            .table()
            .running
            .values()
            .map(|process| ProcessInfo {
                config: Some(process.config.clone()).into(),
                pid: process.pid,
                tag: process.tag.clone(),
                ..Default::default()
            })
            .collect();
        processes.sort_by_key(|process| process.pid);
        Response::ok(ListResponse { processes, ..Default::default() })
    }

    async fn start(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, StartRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<StartResponse> + Send + use<>>> {
        let request = request.to_owned_message();
        let deadline = time_limit(ctx.headers())?.map(|limit| Instant::now() + limit);
        let config = request.process.into_option().unwrap_or_default();
        environment::check(config.envs.iter().map(|(name, value)| (name.as_str(), value.as_str())))
            .map_err(|err| ConnectError::invalid_argument(format!("process.envs: {err}")))?;
        // Before anything is started.
        keepalive(ctx.headers())?;
        let launch = Launch {
            terminal: request.pty.as_option().map(size).transpose()?,
            config,
            tag: request.tag,
            stdin: request.stdin.unwrap_or(true),
            user: credentials::user(ctx.headers(), &self.0.guest)?,
            deadline,
        };
        let processes = Arc::clone(&self.0);
        // On a thread of its own, and to its end even if the caller goes away meanwhile.
        let (pid, listener) = tokio::task::spawn_blocking(move || launch.run(&processes))
            .await
            .map_err(|err| ConnectError::internal(err.to_string()))??;
        let attached = self.attached(ctx.headers(), pid, listener, deadline)?;
        Response::stream_ok(attached.events().map(|event| {
            event.map(|event: ProcessEvent| StartResponse { event: Some(event).into(), ..Default::default() })
        }))
    }

    async fn connect(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, ConnectRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<ConnectResponse> + Send + use<>>> {
        let selector = selector(request.to_owned_message().process.as_option())?;
        let offset = offset(ctx.headers())?;
        let (pid, spool) = self.0.output_of(&selector)?;
        let attached = self.attached(ctx.headers(), pid, spool.listen(offset), None)?;
        let deadline = time_limit(ctx.headers())?.map(|limit| Instant::now() + limit);
        let attached = Attached { deadline, ..attached };
        Response::stream_ok(attached.events().map(|event| {
            event.map(|event: ProcessEvent| ConnectResponse {
                event: Some(event).into(),
                ..Default::default()
            })
        }))
    }

    async fn update<'a>(
        &'a self,
        _: RequestContext,
        request: ServiceRequest<'_, UpdateRequest>,
    ) -> ServiceResult<impl Encodable<UpdateResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let process = self.0.running(&selector(request.process.as_option())?)?;
        if let Some(pty) = request.pty.as_option() {
            let terminal = process.terminal.as_ref().ok_or_else(|| {
                ConnectError::failed_precondition(format!("process {} has no terminal", process.pid))
            })?;
            terminal
                .resize(size(pty)?)
                .map_err(|err| ConnectError::internal(format!("cannot resize the terminal: {err}")))?;
        }
        Response::ok(UpdateResponse::default())
    }

    async fn stream_input<'a>(
        &'a self,
        ctx: RequestContext,
        mut requests: InboundStream<StreamInputRequest>,
    ) -> ServiceResult<impl Encodable<StreamInputResponse> + Send + use<'a>> {
        let mut process = None;
        while let Some(message) = requests.next().await {
            let message = message.map_err(|err| match ctx.extensions().get::<Violation>() {
                Some(violation) => violation.or(err),
                None => err,
            })?;
            match message.to_owned_message().event {
                Some(StreamInputEvent::Start(_)) if process.is_some() => {
                    return Err(ConnectError::invalid_argument(
                        "`start` was sent before: open another stream for another process",
                    ));
                }
                Some(StreamInputEvent::Start(start)) => {
                    process = Some(self.0.running(&selector(start.process.as_option())?)?);
                }
                Some(StreamInputEvent::Data(data)) => {
                    let process = process.as_ref().ok_or_else(|| {
                        ConnectError::invalid_argument("the first message must be `start` and name a process")
                    })?;
                    send(process, data.input.into_option()).await?;
                }
                Some(StreamInputEvent::Keepalive(_)) => {}
                None => {
                    return Err(ConnectError::invalid_argument("a message has no start, data or keepalive"));
                }
            }
        }
        Response::ok(StreamInputResponse::default())
    }

    async fn send_input<'a>(
        &'a self,
        _: RequestContext,
        request: ServiceRequest<'_, SendInputRequest>,
    ) -> ServiceResult<impl Encodable<SendInputResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let process = self.0.running(&selector(request.process.as_option())?)?;
        send(&process, request.input.into_option()).await?;
        Response::ok(SendInputResponse::default())
    }

    async fn send_signal<'a>(
        &'a self,
        _: RequestContext,
        request: ServiceRequest<'_, SendSignalRequest>,
    ) -> ServiceResult<impl Encodable<SendSignalResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let process = self.0.running(&selector(request.process.as_option())?)?;
        let signal = match request.signal.as_known() {
            Some(Signal::SIGNAL_SIGKILL) => libc::SIGKILL,
            Some(Signal::SIGNAL_SIGTERM) => libc::SIGTERM,
            _ => {
                return Err(ConnectError::invalid_argument(
                    "signal must be SIGNAL_SIGTERM or SIGNAL_SIGKILL",
                ));
            }
        };
        process.signal(signal).map_err(|err| match err.raw_os_error() {
            // It has ended; we just have not heard yet.
            Some(libc::ESRCH) => Selector::Pid(process.pid).not_found(),
            _ => ConnectError::internal(format!("error sending signal: {err}")),
        })?;
        Response::ok(SendSignalResponse::default())
    }

    async fn close_stdin<'a>(
        &'a self,
        _: RequestContext,
        request: ServiceRequest<'_, CloseStdinRequest>,
    ) -> ServiceResult<impl Encodable<CloseStdinResponse> + Send + use<'a>> {
        let process = self.0.running(&selector(request.to_owned_message().process.as_option())?)?;
        if process.terminal.is_some() {
            return Err(ConnectError::failed_precondition(
                "cannot close the input of a terminal: send Ctrl+D (0x04) instead",
            ));
        }
        *process.input.lock().await = Input::Closed;
        Response::ok(CloseStdinResponse::default())
    }
}

async fn send(process: &Process, input: Option<ProcessInput>) -> Result<(), ConnectError> {
    let written = match (input.and_then(|input| input.input), &process.terminal) {
        (Some(ProtoInput::Pty(data)), Some(terminal)) => {
            let _in_order = process.input.lock().await;
            tokio::time::timeout(INPUT_WAIT, terminal.write_all(&data)).await
        }
        (Some(ProtoInput::Stdin(data)), None) => match &mut *process.input.lock().await {
            Input::Pipe(pipe) => tokio::time::timeout(INPUT_WAIT, pipe.write_all(&data)).await,
            Input::Closed => {
                return Err(ConnectError::failed_precondition(format!(
                    "stdin of process {} is not enabled or closed",
                    process.pid
                )));
            }
        },
        (Some(ProtoInput::Pty(_)), None) => {
            return Err(ConnectError::failed_precondition("the process has no terminal: send `stdin` input"));
        }
        (Some(ProtoInput::Stdin(_)), Some(_)) => {
            return Err(ConnectError::failed_precondition("the process has a terminal: send `pty` input"));
        }
        (None, _) => return Err(ConnectError::invalid_argument("input has neither stdin nor pty")),
    };
    match written {
        Ok(Ok(())) => Ok(()),
        Ok(Err(err)) => Err(ConnectError::failed_precondition(format!(
            "process {} does not read its input any more: {err}",
            process.pid
        ))),
        Err(_) => Err(ConnectError::deadline_exceeded(format!(
            "process {} has read no input for {} s",
            process.pid,
            INPUT_WAIT.as_secs()
        ))),
    }
}

fn selector(selector: Option<&ProcessSelector>) -> Result<Selector, ConnectError> {
    match selector.and_then(|selector| selector.selector.as_ref()) {
        Some(ProtoSelector::Pid(pid)) => Ok(Selector::Pid(*pid)),
        Some(ProtoSelector::Tag(tag)) => Ok(Selector::Tag(tag.clone())),
        None => Err(ConnectError::invalid_argument("name a process by pid or tag")),
    }
}

fn size(pty: &PTY) -> Result<Size, ConnectError> {
    let Some(size) = pty.size.as_option() else { return Ok(Size { cols: 80, rows: 24 }) };
    let side = |value: u32, name: &str| {
        u16::try_from(value)
            .map_err(|_| ConnectError::invalid_argument(format!("pty.size.{name} {value} is over 65535")))
    };
    Ok(Size { cols: side(size.cols, "cols")?, rows: side(size.rows, "rows")? })
}

fn offset(headers: &HeaderMap) -> Result<Option<u64>, ConnectError> {
    let Some(value) = headers.get(OFFSET) else { return Ok(None) };
    match value.to_str().map(str::trim) {
        // Offsets are wanted, but the place to start is not known.
        Ok("") => Ok(None),
        Ok(text) => text.parse().map(Some).map_err(|_| {
            ConnectError::invalid_argument(format!("{OFFSET} {text:?} is not a number of bytes"))
        }),
        Err(_) => Err(ConnectError::invalid_argument(format!("{OFFSET} is not a number of bytes"))),
    }
}

//! Bodies on their way through: counted, never buffered, cut when the machine is gone.

use super::lane::Ticket;
use crate::metrics::Bytes as Counter;
use axum::body::Body;
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;
use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};
use tokio_util::sync::WaitForCancellationFutureOwned;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A client's body towards the guest.
pub(super) struct Upload {
    inner: Body,
    counter: Counter,
    taken: Taken,
}

/// Whether a client's body has been read to its end.
#[derive(Clone, Default)]
pub(super) struct Taken(Arc<AtomicBool>);

impl Taken {
    pub(super) fn whole(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

impl Upload {
    pub(super) fn wrap(inner: Body, counter: Counter, taken: Taken) -> Body {
        // A body known to be empty is left as it is, so that no framing is made up for it.
        if inner.is_end_stream() {
            taken.0.store(true, Ordering::Release);
            return inner;
        }
        Body::new(Self { inner, counter, taken })
    }
}

impl HttpBody for Upload {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.inner).poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &frame
            && let Some(data) = frame.data_ref()
        {
            self.counter.add(data.len());
        }
        if matches!(frame, Poll::Ready(None)) || self.inner.is_end_stream() {
            self.taken.0.store(true, Ordering::Release);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// A guest's body towards the client. Holds the place in the lane until it is dropped.
pub(super) struct Download {
    inner: Incoming,
    _ticket: Ticket,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    counter: Counter,
}

impl Download {
    pub(super) fn wrap(inner: Incoming, ticket: Ticket, counter: Counter) -> Body {
        let cut = Box::pin(ticket.cut().clone().cancelled_owned());
        Body::new(Self { inner, _ticket: ticket, cut, counter })
    }
}

impl HttpBody for Download {
    type Data = Bytes;
    type Error = Failure;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        // An error, not an end: the client must see a broken stream, not a short one that looks complete.
        if self.cut.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err("the sandbox is gone".into())));
        }
        let frame = std::task::ready!(Pin::new(&mut self.inner).poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            self.counter.add(data.len());
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

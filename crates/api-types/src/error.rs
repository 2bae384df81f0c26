//! The body of every response that isn't a success.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a client can branch on. Once published a code keeps its meaning; new ones may appear, so a client treats
/// [`ErrorCode::Unknown`] like no code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorCode {
    /// The key is missing or wrong.
    Unauthorized,
    /// The key is right but the thing belongs to another team.
    Forbidden,
    /// A value is missing, malformed or out of range; the message names it.
    InvalidRequest,
    /// The body exceeds the limit.
    BodyTooLarge,
    /// The body did not arrive in time.
    BodyTimeout,
    /// No such route.
    RouteNotFound,
    /// The route exists, not with this method.
    MethodNotAllowed,
    /// No such sandbox, or its tombstone has expired.
    SandboxNotFound,
    /// The sandbox has ended; the message names the cause.
    SandboxEnded,
    /// The sandbox is in a state that refuses this.
    SandboxConflict,
    /// The sandbox exists but can't serve this now.
    SandboxUnavailable,
    /// No such template, or none that is ready.
    TemplateNotFound,
    /// No such build.
    BuildNotFound,
    /// No room; try again after `Retry-After`.
    SandboxCapacityUnavailable,
    /// A step took longer than its deadline.
    DeadlineExceeded,
    /// Part of the contract that this version does not have.
    NotImplemented,
    /// A fault of the node.
    InternalServerError,
    /// A code this version of the types does not know.
    #[serde(other)]
    Unknown,
}

/// Body of every non-2xx response of the control plane.
///
/// The JavaScript SDK looks at `code`, not at the HTTP status, so both always agree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Error)]
pub struct ErrorBody {
    /// The HTTP status.
    pub code: u16,
    /// One sentence for a person: what was wrong and what to do.
    pub message: String,
    /// Machine-readable cause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub error_code: Option<ErrorCode>,
}

/// Body of an error that the guest proxy itself gives. Clients match on the words of `message`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GuestErrorBody {
    /// The sandbox as it was addressed.
    #[serde(rename = "sandboxId")]
    pub sandbox_id: String,
    /// What went wrong.
    pub message: String,
    /// The guest port, where it matters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// The HTTP status.
    pub code: u16,
}

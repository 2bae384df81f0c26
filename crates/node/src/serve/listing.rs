//! Lists in pages, newest first.

use crate::{
    control::{Error, Result},
    model::{Page, Principal, Sandbox, SandboxQuery, State},
    node::{Inner, View},
};
use std::sync::Arc;

pub(super) fn token_of((micros, id): &(i64, String)) -> String {
    format!("{micros}-{id}")
}

pub(super) fn parse_token(token: &str) -> Result<(i64, String)> {
    token
        .split_once('-')
        .and_then(|(micros, id)| Some((micros.parse().ok()?, id.to_owned())))
        .ok_or_else(|| Error::Invalid("the page token is not one that a list returned".to_owned()))
}

pub(super) fn list(inner: &Inner, who: &Principal, query: &SandboxQuery) -> Result<Page<Sandbox>> {
    let template = match &query.template {
        Some(reference) => match inner.catalog.find(&who.team, reference) {
            Ok((template, _)) => Some(template.id),
            // A filter that nothing can match is an empty list, not an error.
            Err(Error::TemplateNotFound(_) | Error::TemplateForbidden(_)) => {
                return Ok(Page { items: Vec::new(), next: None });
            }
            Err(error) => return Err(error),
        },
        None => None,
    };
    let after = query.token.as_deref().map(parse_token).transpose()?;
    let wanted = |sandbox: &Sandbox| {
        let states: &[State] =
            if query.states.is_empty() { &[State::Running, State::Paused] } else { query.states.as_slice() };
        sandbox.team == who.team
            && states.contains(&outward(sandbox.state))
            && template.as_ref().is_none_or(|template| sandbox.template == *template)
            && query.started_after.is_none_or(|after| sandbox.started_at >= after)
            && query.metadata.iter().all(|(key, value)| sandbox.metadata.get(key) == Some(value))
    };
    let place = |sandbox: &Sandbox| (sandbox.started_at.as_microsecond(), sandbox.id.to_string());
    let mut found: Vec<Arc<View>> =
        inner.views.read().values().filter(|view| wanted(&view.sandbox)).cloned().collect();
    found.sort_by_key(|view| place(&view.sandbox));
    if !query.ascending {
        found.reverse();
    }
    let beyond = |view: &&Arc<View>| {
        after.as_ref().is_none_or(|after| {
            let place = place(&view.sandbox);
            if query.ascending { place > *after } else { place < *after }
        })
    };
    let mut rest = found.iter().filter(beyond);
    let items: Vec<_> = rest.by_ref().take(query.limit.clamp(1, 100)).collect();
    let next = rest.next().and(items.last()).map(|last| token_of(&place(&last.sandbox)));
    let shown = |view: &Arc<View>| Sandbox { state: outward(view.sandbox.state), ..view.sandbox.clone() };
    Ok(Page { items: items.into_iter().map(shown).collect(), next })
}

/// The state a list shows: those of operations count as what they lead from or to.
fn outward(state: State) -> State {
    match state {
        State::Snapshotting | State::Forking | State::Pausing => State::Running,
        State::Resuming => State::Paused,
        state => state,
    }
}
